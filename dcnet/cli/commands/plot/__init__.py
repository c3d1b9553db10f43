"""Draw operators, and what runs have done and learned."""
