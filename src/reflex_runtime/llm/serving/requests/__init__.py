"""What clients send: fields, validated, and what they ask of a model."""
