//! Conversion of map keys and values to bytes and back. All `unsafe` code of this crate is in this
//! module.

/// Type that a BPF map may contain: `repr(C)`, without padding, and valid for every bit pattern.
///
/// # Safety
/// The implementor has no padding, no pointer, no `bool` and no enum. The C header asserts sizes
/// and offsets, and a test compares the BTF of the compiled object with Rust's layout.
pub unsafe trait Plain: Copy + Default {}

// SAFETY: an integer has neither padding nor forbidden values.
unsafe impl Plain for u32 {}
// SAFETY: an integer has neither padding nor forbidden values.
unsafe impl Plain for u64 {}

/// Returns the bytes of `value` in the form in which the kernel copies them.
pub fn to_bytes<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: `Plain` promises that all `size_of::<T>()` bytes are initialized; the lifetime is
    // that of the borrow.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
}

/// Reads a value from `bytes`. Returns `None` if their number is not the size of `T`.
pub fn from_bytes<T: Plain>(bytes: &[u8]) -> Option<T> {
    // SAFETY: the length is checked, the read is unaligned, and `Plain` promises that any bytes are
    // a value.
    (bytes.len() == size_of::<T>())
        .then(|| unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<T>()) })
}

/// Implements [`Plain`] for the listed types and records their layouts, which a test compares with
/// the object's BTF.
macro_rules! plain_types {
    ($($rust:ident = $c:ident { $($field:ident),+ $(,)? }),+ $(,)?) => {
        $(
            // SAFETY: the header asserts its size and offsets; all fields are integers or arrays of
            // integers, and the list is complete (checked against BTF).
            unsafe impl $crate::Plain for $rust {}
        )+
        /// Layout in Rust of every struct of the header: C name, size in bytes, and the offset of
        /// each field in bytes.
        pub const LAYOUTS: &[(&str, usize, &[(&str, usize)])] = &[
            $((stringify!($c), size_of::<$rust>(), &[$((stringify!($field), std::mem::offset_of!($rust, $field))),+])),+
        ];
    };
}
pub(crate) use plain_types;
