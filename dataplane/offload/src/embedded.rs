//! BPF objects that the build embeds in this library. It gives them the alignment that an ELF
//! reader needs, and loads nothing.

/// The bytes of a compiled BPF object, aligned as ELF headers must be.
#[repr(C, align(8))]
pub(crate) struct EmbeddedObject<B: ?Sized>(pub(crate) B);
