"""How a training ends: asked to, by an error, or while the learner waits for workers that are gone."""
