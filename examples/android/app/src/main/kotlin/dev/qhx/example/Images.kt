package dev.qhx.example

import android.content.ContentResolver
import android.graphics.Bitmap
import android.graphics.BitmapFactory
import android.net.Uri
import dev.qhx.Image
import java.io.ByteArrayOutputStream
import java.io.IOException

/** Largest file of an image. */
private const val MAX_BYTES = 32 shl 20

/** Formats that the library reads by itself. */
private val READ = setOf("image/png", "image/jpeg", "image/webp", "image/gif")

/** The image that the user picked. Formats that only Android reads, such as HEIC, become PNG. */
@Throws(IOException::class)
fun readImage(resolver: ContentResolver, uri: Uri): Image {
    val stream = resolver.openInputStream(uri) ?: throw IOException("nothing is there")
    val bytes = stream.use { input ->
        val out = ByteArrayOutputStream()
        val buffer = ByteArray(1 shl 16)
        while (true) {
            val read = input.read(buffer)
            if (read < 0) break
            out.write(buffer, 0, read)
            if (out.size() > MAX_BYTES) throw IOException("it has more than ${MAX_BYTES shr 20} MB")
        }
        out.toByteArray()
    }
    if (resolver.getType(uri) in READ) return Image(bytes)
    val bitmap = BitmapFactory.decodeByteArray(bytes, 0, bytes.size) ?: throw IOException("it is no image")
    val png = ByteArrayOutputStream()
    bitmap.compress(Bitmap.CompressFormat.PNG, 100, png)
    return Image(png.toByteArray())
}
