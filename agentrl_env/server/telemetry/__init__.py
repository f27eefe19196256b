"""What a server tells of itself: counters, a log of events, traces, and who hears of what happens."""
