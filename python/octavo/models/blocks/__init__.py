"""The blocks of a decoder layer. They call the op set and import no tensor library."""
