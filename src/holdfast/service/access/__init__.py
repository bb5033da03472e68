"""Authentication of callers, their rate limits, and admission of their calls."""
