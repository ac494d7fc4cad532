"""What programs ask: runs, evolutions and models over HTTP and WebSocket, and over MCP.

| file | what is in it |
|---|---|
"""
