"""The console of the session service: one web page for operators.

Static files and the application that serves them. It imports no other part: the page calls the service over HTTP,
with a token, as any other client does.
"""
