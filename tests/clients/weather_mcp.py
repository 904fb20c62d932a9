"""An MCP server over stdio with one tool."""

from typing import Literal

from mcp.server import MCPServer

server = MCPServer("weather")


@server.tool()
def weather(city: Literal["Bonn"]) -> str:
    return f"Sun in {city}."


server.run()
