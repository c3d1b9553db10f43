"""Draw operators, margins, and what runs have done and learned."""
