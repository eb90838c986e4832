"""The address of a server, checked before anything slow is imported."""


def api_of(url: str) -> str:
    """The API's address, such as `http://127.0.0.1:8000/v1`, for that of a server with or without `/v1`.

    Raises:
        ValueError: this is not an HTTP address.
    """
    address = url.strip().rstrip("/")
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"server {url!r} is not an address: write one such as http://127.0.0.1:8000/v1")
    return address if address.endswith("/v1") else f"{address}/v1"
