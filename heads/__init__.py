"""What a drafter is: the protocol, its trees, its vocabulary, and one file for each kind."""
