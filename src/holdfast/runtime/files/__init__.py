"""Files of this machine behind `FileApi`, also as another user."""
