//! Map keys and values as bytes. The only `unsafe` of this crate.

/// A `repr(C)` type without holes, for which every bit pattern is a value: what a BPF map may hold.
///
/// # Safety
/// The implementor has no padding, no pointer, no `bool` and no enum. The C header asserts the sizes and offsets; the test that compares
/// the object's BTF with Rust's layout holds both to each other.
pub unsafe trait Plain: Copy + Default {}

// SAFETY: an integer has neither padding nor forbidden values.
unsafe impl Plain for u32 {}

/// The bytes of `value`, as the kernel copies them.
pub fn to_bytes<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: `Plain` promises that all `size_of::<T>()` bytes are initialised; the lifetime is that of the borrow.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
}

/// The value that `bytes` hold; `None` if their number is not `T`'s size.
pub fn from_bytes<T: Plain>(bytes: &[u8]) -> Option<T> {
    // SAFETY: the length is checked, the read is unaligned, and `Plain` promises that any bytes are a value.
    (bytes.len() == size_of::<T>()).then(|| unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<T>()) })
}

/// Lists plain types once: the trait, and the layout that the BTF test compares.
macro_rules! plain_types {
    ($($rust:ident = $c:ident { $($field:ident),+ $(,)? }),+ $(,)?) => {
        $(
            // SAFETY: the header asserts its size and offsets; all fields are integers or arrays of them, none left out (checked against BTF).
            unsafe impl $crate::Plain for $rust {}
        )+
        /// Every struct of the header as Rust lays it out: C name, size in bytes, and each field's offset in bytes.
        pub const LAYOUTS: &[(&str, usize, &[(&str, usize)])] = &[
            $((stringify!($c), size_of::<$rust>(), &[$((stringify!($field), std::mem::offset_of!($rust, $field))),+])),+
        ];
    };
}
pub(crate) use plain_types;
