"""A run from its first moment to its last word: jobs, lives, endings, resumes, and what its folder tells."""
