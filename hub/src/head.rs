//! Programs in the place of data: nothing of a bundle or checkpoint is one.

/// Bytes of a file that are looked at.
pub(crate) const HEAD: usize = 4096;

/// Ends of names of what systems or interpreters run, or run code of when they load it.
const PROGRAMS: [&str; 30] = [
    "apk", "app", "bash", "bat", "ckpt", "class", "cmd", "com", "dll", "dylib", "elf", "exe",
    "jar", "js", "ko", "lua", "msi", "pickle", "pkl", "pl", "ps1", "pt", "pth", "py", "pyc", "rb",
    "sh", "so", "vbs", "whl",
];

/// True for the name of what is run, or runs code when it is loaded.
pub(crate) fn is_program_name(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path).to_ascii_lowercase();
    let end = name.rsplit_once('.').map(|(_, end)| end);
    end.is_some_and(|end| PROGRAMS.contains(&end)) || name.contains(".so.")
}

/// Kind of program that begins with these bytes, if any.
pub(crate) fn program(head: &[u8]) -> Option<&'static str> {
    let number = |at: usize| {
        let bytes = head.get(at..at.checked_add(4)?)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?))
    };
    match head {
        [0x7f, b'E', b'L', b'F', ..] => Some("a program (ELF)"),
        [b'#', b'!', b'/' | b' ', ..] => Some("a script"),
        [0xcf | 0xce, 0xfa, 0xed, 0xfe, ..] => Some("a program (Mach-O)"),
        // Two letters may be numbers: the header that they lead to may not.
        [b'M', b'Z', ..] => {
            let at = usize::try_from(number(0x3c)?).ok()?;
            (number(at)? == u32::from_le_bytes(*b"PE\0\0")).then_some("a program (PE)")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_recognised_by_name_and_content() {
        for path in ["a/setup.py", "lib.SO", "libQnn.so.2", "a.b/x.exe", "pytorch_model.pt"] {
            assert!(is_program_name(path), "{path}");
        }
        for path in ["decode.bin", "so", "a.so/decode.bin", "model.safetensors", "tokenizer.json"] {
            assert!(!is_program_name(path), "{path}");
        }
        let mut windows = vec![0; 0x90];
        windows[..2].copy_from_slice(b"MZ");
        assert_eq!(program(&windows), None);
        windows[0x3c] = 0x80;
        windows[0x80..0x84].copy_from_slice(b"PE\0\0");
        for head in [&b"\x7fELF\x02"[..], b"#!/bin/sh", b"\xcf\xfa\xed\xfe", &windows] {
            assert!(program(head).is_some(), "{head:?}");
        }
        for head in [&b""[..], b"#", b"{\"a\": 1}", b"MZ", b"GGUF"] {
            assert_eq!(program(head), None, "{head:?}");
        }
    }
}
