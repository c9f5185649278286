"""The control socket."""
