"""The versions of models as a producer sees them: their life, and who gets jobs."""
