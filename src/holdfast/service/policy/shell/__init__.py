"""Shell syntax as the policy reads it: words, redirections, arithmetic and the grammar; pure."""
