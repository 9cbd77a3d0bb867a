"""What an op and its plain form have in common: options, arguments, and a layer's arithmetic."""
