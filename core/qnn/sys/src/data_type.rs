//! Numbers of the element types. The low hexadecimal digits are the decimal width.

pub const TYPE_INT_8: u32 = 0x008;
pub const TYPE_INT_16: u32 = 0x016;
pub const TYPE_INT_32: u32 = 0x032;
pub const TYPE_INT_64: u32 = 0x064;
pub const TYPE_UINT_8: u32 = 0x108;
pub const TYPE_UINT_16: u32 = 0x116;
pub const TYPE_UINT_32: u32 = 0x132;
pub const TYPE_UINT_64: u32 = 0x164;
pub const TYPE_FLOAT_16: u32 = 0x216;
/// The one whose digits are not its width.
pub const TYPE_BFLOAT_16: u32 = 0x226;
pub const TYPE_FLOAT_32: u32 = 0x232;
pub const TYPE_FLOAT_64: u32 = 0x264;
pub const TYPE_SFIXED_8: u32 = 0x308;
pub const TYPE_SFIXED_16: u32 = 0x316;
pub const TYPE_SFIXED_32: u32 = 0x332;
pub const TYPE_UFIXED_8: u32 = 0x408;
pub const TYPE_UFIXED_16: u32 = 0x416;
pub const TYPE_UFIXED_32: u32 = 0x432;
pub const TYPE_BOOL: u32 = 0x508;
/// A NUL-terminated string, in scalar parameters only.
pub const TYPE_STRING: u32 = 0x608;
