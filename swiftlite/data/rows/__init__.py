"""Files to rows, and rows to conversations or documents."""
