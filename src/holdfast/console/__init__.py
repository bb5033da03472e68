"""The console of the session service: one web page for people who look after sessions.

Static files and the application that serves them. It knows nothing of ours: the page asks the service over HTTP,
with a token, as any other client does.
"""
