"""Contract suites that tests of your own tier, policy or manager can inherit. They need pytest."""
