"""Files of requests in OpenAI's format: what bodies mean, how replies look, and the run that resumes where it stopped."""
