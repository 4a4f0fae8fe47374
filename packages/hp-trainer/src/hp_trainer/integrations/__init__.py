"""Other libraries' interfaces to `hp-train`. Each module needs its library, and nothing else imports it."""
