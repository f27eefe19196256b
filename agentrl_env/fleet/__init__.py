"""One address for many servers: places sessions, routes calls and reports lost sessions."""
