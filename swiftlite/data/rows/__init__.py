"""Read rows from files, and parse rows into conversations or documents."""
