"""Every codec: bytes and errors, on Gaussian numbers and on what real runs send."""
