"""Two hosts on one machine, with a network between them that can be made bad."""
