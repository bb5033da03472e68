"""Read models for dashboards: summaries, screens, streams of terminals, commands, recordings, usage, the fleet."""
