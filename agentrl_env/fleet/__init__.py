"""One address for many servers: places sessions, routes calls, and says what was lost."""
