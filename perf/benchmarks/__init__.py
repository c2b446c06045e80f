"""`make bench`: the ratios that the project claims, each against a peer in the same run."""
