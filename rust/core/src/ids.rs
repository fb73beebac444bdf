//! A type for each number that is passed around, so that a slot is never taken for a block.

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $repr:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub $repr);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id!(/// One block of the KV cache. Block 0 is the null block: padding writes there, nobody reads it.
    BlockId, u32);
id!(/// One row of the device's slot state, held by a running request.
    Slot, u32);
id!(/// A step, numbered from 1 in the order of `schedule`.
    StepId, u64);
id!(/// A client's request; its choices share it.
    RequestId, u64);
id!(/// What a cached prefix must share besides its tokens: tenant salt, adapter and version.
    Namespace, u64);
id!(/// Whoever fairness is kept between.
    TenantId, u64);

impl BlockId {
    /// The block that padding writes to.
    pub const NULL: Self = Self(0);
}
