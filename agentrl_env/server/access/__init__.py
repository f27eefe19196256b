"""Who may call, and how much: tokens, limits, the rate, and the manners of connections."""
