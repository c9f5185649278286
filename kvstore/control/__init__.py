"""Control: inspect and change a store while it serves, over a socket."""
