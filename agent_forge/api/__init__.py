"""What programs ask: runs, evolutions and models over HTTP and WebSocket, and over MCP.

| file | what is in it |
|---|---|
| app | the application: who may come in, how errors look, what belongs together |
| runs | phases and runs: start, stop, status, results |
| allowed | which settings a start may have |
| updates | the WebSocket: what a run measures, as it comes, numbered |
| openai | /v1: models, chat/completions, completions |
| questions | what /v1 may be asked |
| mcp_server | the read-only server for assistants |
"""
