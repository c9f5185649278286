"""The engine and the ways to drive it: a loop's steps, a scheduler's steps."""
