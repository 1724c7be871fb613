//! Resolves plain scalars by YAML 1.2.2 §10.3.2, except that numbers which YAML 1.1 reads
//! differently (`010`) stay texts.

use crate::tree::YamlValue;

/// Returns the value of the unquoted scalar `text`.
pub(crate) fn resolve(text: &str) -> YamlValue {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return YamlValue::Null,
        "true" | "True" | "TRUE" => return YamlValue::Bool(true),
        "false" | "False" | "FALSE" => return YamlValue::Bool(false),
        _ => {}
    }
    number(text).unwrap_or_else(|| YamlValue::Text(text.to_owned()))
}

fn number(text: &str) -> Option<YamlValue> {
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16)
            .ok()
            .map(YamlValue::Unsigned);
    }
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    let is_digits = |part: &str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_digit());
    if is_digits(unsigned) {
        // YAML 1.1 reads a leading zero as octal, so the writer's intention is not certain.
        if unsigned.len() > 1 && unsigned.starts_with('0') {
            return None;
        }
        let whole = text
            .parse()
            .map(YamlValue::Unsigned)
            .or_else(|_| text.parse().map(YamlValue::Signed));
        // An integer outside 64 bits becomes a float.
        return whole
            .ok()
            .or_else(|| text.parse().ok().map(YamlValue::Float));
    }
    let (mantissa, exponent) = unsigned
        .split_once(['e', 'E'])
        .map_or((unsigned, None), |(mantissa, exponent)| {
            (mantissa, Some(exponent))
        });
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let is_float = (is_digits(whole) || (whole.is_empty() && is_digits(fraction)))
        && (fraction.is_empty() || is_digits(fraction))
        && exponent.is_none_or(|exponent| {
            is_digits(exponent.strip_prefix(['+', '-']).unwrap_or(exponent))
        });
    is_float.then(|| text.parse().ok().map(YamlValue::Float))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_scalars_follow_the_core_schema() {
        let text = |s: &str| YamlValue::Text(s.to_owned());
        for (given, expected) in [
            ("", YamlValue::Null),
            ("~", YamlValue::Null),
            ("null", YamlValue::Null),
            ("nullable", text("nullable")),
            ("true", YamlValue::Bool(true)),
            ("yes", text("yes")),
            ("0", YamlValue::Unsigned(0)),
            ("80", YamlValue::Unsigned(80)),
            ("+80", YamlValue::Unsigned(80)),
            ("-80", YamlValue::Signed(-80)),
            ("0x1F", YamlValue::Unsigned(31)),
            ("0xZ", text("0xZ")),
            ("0o17", text("0o17")),
            ("010", text("010")),
            (
                "18446744073709551616",
                YamlValue::Float(18_446_744_073_709_551_616.0),
            ),
            ("1.5", YamlValue::Float(1.5)),
            (".5", YamlValue::Float(0.5)),
            ("1.", YamlValue::Float(1.0)),
            ("1e3", YamlValue::Float(1000.0)),
            ("1e", text("1e")),
            (".", text(".")),
            ("-", text("-")),
            ("1.2.3", text("1.2.3")),
            ("10.0.0.1/8", text("10.0.0.1/8")),
            ("12:30", text("12:30")),
            ("v1", text("v1")),
            (".inf", text(".inf")),
        ] {
            assert_eq!(resolve(given), expected, "{given:?}");
        }
    }
}
