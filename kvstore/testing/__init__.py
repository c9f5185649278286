"""Contract suites that a tier or a policy of your own can inherit. They need pytest."""
