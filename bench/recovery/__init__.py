"""What a SIGKILLed replica costs: Holdfast and its peers, the same model, in one run on one machine."""
