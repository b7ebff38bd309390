"""SGLang's processes behind our services: command lines, pairing of prefill and decode, supervision."""
