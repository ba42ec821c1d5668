"""Groups that are trained on without being sampled for the step: of files, or of the run itself."""
