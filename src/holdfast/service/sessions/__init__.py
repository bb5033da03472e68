"""The sessions themselves: made, used, watched, timed and closed. Talks to sandboxes through the client."""
