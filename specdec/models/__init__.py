"""Models, and where their files come from. Finding a model needs no torch; running it does."""
