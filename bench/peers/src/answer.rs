//! HTTP/1.1 responses as a load reads them: their end and their status. It sends nothing.

use anyhow::Context;

/// Returns the status and the length of the response at the beginning of `bytes`, if it is
/// complete.
pub fn read_complete_answer(bytes: &[u8]) -> anyhow::Result<Option<(u16, usize)>> {
    let mut fields = [httparse::EMPTY_HEADER; 32];
    let mut head = httparse::Response::new(&mut fields);
    let httparse::Status::Complete(head_length) = head.parse(bytes)? else {
        return Ok(None);
    };
    let length = head
        .headers
        .iter()
        .find(|f| f.name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|f| std::str::from_utf8(f.value).ok()?.parse::<usize>().ok());
    let total_length = head_length + length.context("an answer without content-length")?;
    Ok((bytes.len() >= total_length).then_some((head.code.unwrap_or(0), total_length)))
}

#[cfg(test)]
mod tests {
    use super::read_complete_answer;

    #[test]
    fn responses_are_split_correctly() {
        let two = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabcHTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(read_complete_answer(two).ok().flatten(), Some((200, 41)));
        assert_eq!(
            read_complete_answer(&two[41..]).ok().flatten(),
            Some((404, 45))
        );
        assert_eq!(read_complete_answer(&two[..40]).ok().flatten(), None);
        assert!(read_complete_answer(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
    }
}
