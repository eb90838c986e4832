def custom_generate():
    """x"""
