"""The platform of hp-dtensor for paddle."""
