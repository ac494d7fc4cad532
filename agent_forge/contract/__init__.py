"""What a phase is: its controller, its context, its result, and the rules of handing over."""
