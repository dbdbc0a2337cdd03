"""What the programs share: flags, folders of results, tables, processes."""
