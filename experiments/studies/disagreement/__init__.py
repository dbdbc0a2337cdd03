"""DCD or ECD: which quantizer favours which, and from where on."""
