"""What a server answers at `/` where no page is mounted."""

from __future__ import annotations

import httpx


def test_the_root_names_the_routes(server):
    record = httpx.get(server.url).json()
    assert (record["name"], record["model"]) == ("selfspec", "tiny")
    assert {"POST /v1/chat/completions", "GET /v1/models", "GET /metrics", "GET /health"} <= set(record["routes"])
    assert "--app" in record["page"]
    # What it names is there.
    for route in record["routes"]:
        method, path = route.split()
        if method == "GET" and "{" not in path:
            assert httpx.get(server.url + path).status_code == 200
