"""What prefill, decode and merged workers share: sessions, attempts, hand-over, registration, drain."""
